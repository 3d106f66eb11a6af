"""The store on disk, without torch: names, manifests, tiles, codecs, reading, writing, deleting."""
