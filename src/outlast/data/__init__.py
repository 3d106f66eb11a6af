"""Data: text to tokens once, then batches that depend on the step alone.

    from pathlib import Path
    from outlast.data import BatchLoader, SampleOrder, SampleWindow, prepare
    data = prepare("stdlib", cache=Path("tokens"), validation_fraction=0.05)
    windows = SampleWindow(data.train, sequence_length=128)
    loader = BatchLoader(windows, SampleOrder(windows.samples, seed=0), batch_size=16)
    for step, parts in loader.prefetching(0, 100): ...   # parts[0].inputs: (16, 128) int64

The order of samples is a function of (seed, global sample index): a run that restarts, with the
same or another number of ranks, sees every sample exactly once per epoch. Everything is NumPy.
"""

from outlast.data.batches import (
    BatchLoader,
    MicroBatch,
    SampleOrder,
    SampleWindow,
    microbatch_count,
    microbatches,
    samples_until,
    share,
)
from outlast.data.prepare import (
    Prepared,
    prepare,
    split_by_name,
    stdlib_files,
    stdlib_root,
    text_files,
    wait_for,
    whole_files,
)
from outlast.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from outlast.data.tokens import (
    TokenFile,
    check_vocabulary,
    read_index,
    write_index,
    write_tokens,
)

__all__ = [
    "BatchLoader",
    "ByteTokenizer",
    "MicroBatch",
    "Prepared",
    "SampleOrder",
    "SampleWindow",
    "TokenFile",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "microbatch_count",
    "microbatches",
    "prepare",
    "read_index",
    "samples_until",
    "share",
    "split_by_name",
    "stdlib_files",
    "stdlib_root",
    "text_files",
    "wait_for",
    "whole_files",
    "write_index",
    "write_tokens",
]
