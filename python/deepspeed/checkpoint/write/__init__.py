"""Writing: bytes of files, their checksums, and how a folder of them appears whole."""
