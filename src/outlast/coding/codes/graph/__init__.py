"""Codes made of graphs: chunks are vertices, and workers edges or neighbourhoods."""
