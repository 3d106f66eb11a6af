"""The example of Megatron's tokens makes an index that says what was written."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "megatron" / "prepare_tokens.py"


def test_texts_become_tokens_with_an_index(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"first\n")
    (tmp_path / "b.txt").write_bytes(b"second\n")
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "tokens"), *texts],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "15 tokens in 2 documents",
        f"--data-path {tmp_path / 'tokens' / 'train'}",
    ]
    assert (tmp_path / "tokens" / "train.idx").is_file()
