"""TTT-Linear checkpoints of the ttt-lm-pytorch family."""

from ..streaming import StreamingCausalLM


class TTTForCausalLM(StreamingCausalLM):
    """The architecture's published name."""


EntryClass = TTTForCausalLM
