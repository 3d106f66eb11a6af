"""Let an exported model write: python generate.py FOLDER PROMPT."""

import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, prompt = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokens = torch.tensor([list(prompt.encode())])  # bytes are this model's tokens
    torch.manual_seed(0)
    written = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=80,
        do_sample=True,
        temperature=0.7,
        pad_token_id=0,
        eos_token_id=None,
    )
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
