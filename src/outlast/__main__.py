"""``python -m outlast`` is ``outlast``: what ``torchrun -m outlast train job.toml`` starts."""

from outlast.cli.main import main

if __name__ == "__main__":
    main()
