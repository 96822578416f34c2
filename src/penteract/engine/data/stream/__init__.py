"""Data that can only be read forwards: documents of the hub, tokenised ahead of the step that trains on them.

    hub_documents (rows) -> stream_blocks (tokens, in blocks of windows) -> read_ahead (a thread) -> stream_samples

A checkpoint notes where its stream is read on, so a resumed run does not tokenise again what was trained on.
"""
