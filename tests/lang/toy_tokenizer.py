"""A small real tokenizer: byte-level BPE, so that one character may take several tokens."""

from functools import cache
from typing import Any

TEXT = """A state is a function of the exact token sequence. Yes or no? The answer is 42.
The model reads, the model writes, the model keeps what it reads. STOP here. Stop words may end
inside a token. def f(x): return x + 1  # ok
日本語のテキスト。 状態は系列の関数です。 🙂🚀 é ü
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)


@cache
def toy_tokenizer(adds_bos: bool = False) -> Any:
    """ChatML special tokens, about 400 merges of TEXT; `adds_bos` puts <s> in front of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    ascii_only = "".join(c for c in TEXT if ord(c) < 128)
    bpe.train_from_iterator([ascii_only] * 2, trainer)
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>" if adds_bos else "<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
