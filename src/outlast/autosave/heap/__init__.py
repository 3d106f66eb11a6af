"""What a program holds in memory: its objects named, written down and put back in place."""
