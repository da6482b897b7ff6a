"""The gpunode protocol: records, machines and arithmetic.

Pure: nothing in this package does IO, reads a clock, draws randomness or logs. Bytes, keys, nonces and the
time come in as arguments; everything that comes from a peer is hostile until it is decoded and verified.
"""
