"""Everything that touches ``sglang.srt``: the one place where the contract meets the runtime.

Importing this package imports nothing of SGLang; each module does so when it is needed.
"""
