"""The chat template of a model: its own when that is ChatML, else SGLang's by model path."""

from __future__ import annotations

from typing import Any

from sglang.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
)

_PROBE = "sgl_rwttt probe"
_SYSTEM = ("<|im_start|>system\n", "<|im_end|>\n")
_USER = f"<|im_start|>user\n{_PROBE}<|im_end|>\n"


def chat_template(name: str | None, model_path: str, tokenizer: Any) -> ChatTemplate:
    """Template `name`, or the one that fits the model."""
    if name is not None:
        return get_chat_template(name)
    return _chatml(tokenizer) or get_chat_template_by_model_path(model_path)


def _chatml(tokenizer: Any) -> ChatTemplate | None:
    """The tokenizer's template as a ChatTemplate when it renders plain ChatML, else None."""
    if "<|im_start|>" not in str(getattr(tokenizer, "chat_template", None) or ""):
        return None
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False)
    before, found, after = rendered.partition(_USER)
    prefix, suffix = _SYSTEM
    if not found or after:
        return None
    if not before:
        return get_chat_template("chatml")
    if not (before.startswith(prefix) and before.endswith(suffix)):
        return None
    known = get_chat_template("chatml")
    return ChatTemplate(
        name="chatml",
        default_system_prompt=before[len(prefix) : -len(suffix)],
        role_prefix_and_suffix=known.role_prefix_and_suffix,
        stop_str=known.stop_str,
    )
