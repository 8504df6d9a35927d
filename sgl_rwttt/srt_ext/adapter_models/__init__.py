"""Model classes for ``--ttt-backend lora_delta``, found through SGLANG_EXTERNAL_MODEL_PACKAGE.

They keep the architecture's own names, so that everything SGLang keys by architecture holds.
"""
