"""The global order that no world size changes, and the data that is read in it.

`order` says which sample is the k-th and how a global batch is cut into ranks and micro-batches: pure
functions. `loader` reads any ordered data by them (`workers` fetch ahead) and yields `micros.Micros`, one
per step. `batches.Batches` (a map-style Dataset), `tokens.TokenData` (text) and `mixture.Mixture` (several
of either) are ordered; `stream.Stream` (an iterable) has the order of its own iterable. `files`, `tokenize`
and `token_file` turn text into a token file.

Nothing is imported here: `files`, `tokenize`, `token_file`, `order` and `micros` work without torch.
"""
