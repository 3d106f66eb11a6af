"""The program as text: where it trains, what is live there, and the text that can be re-entered."""
