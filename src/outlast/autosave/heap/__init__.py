"""The heap of a program: its objects named, written down and put back in place."""
