"""Whole models of Hugging Face's transformers: their folders, and converting them."""
