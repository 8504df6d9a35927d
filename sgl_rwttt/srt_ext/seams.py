"""The table of everything in SGLang that this package extends, and the check that it is there.

``SEAMS`` is the whole list: official extension points first, then the patched methods. It is
checked at start-up against the pinned version; a missing target stops the server with its name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import version

PINNED = "0.5.23"


class SeamError(RuntimeError):
    """SGLang is not the pinned version, or a name that we extend is missing from it."""


@dataclass(frozen=True)
class Seam:
    """One point of contact."""

    target: str  # dotted path inside sglang
    kind: str  # "registry", "subclass", "override", "patch", "call"
    why: str


SEAMS: tuple[Seam, ...] = (
    Seam("sglang.srt.plugins:load_plugins", "registry", "entry point group sglang.srt.plugins"),
    Seam(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook",
        "registry",
        "defaults and refusals for a TTT checkpoint",
    ),
    Seam(
        "sglang.srt.mem_cache.registry:register_radix_cache_backend",
        "registry",
        "the radix cache that couples KV and state",
    ),
    Seam(
        "sglang.srt.mem_cache.registry:create_unified_radix_cache",
        "registry",
        "builds the cache with our class",
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend",
        "registry",
        "the CPU attention rwttt_cpu",
    ),
    Seam(
        "sglang.srt.arg_groups.choices:add_attention_backend_choices",
        "registry",
        "--attention-backend rwttt_cpu",
    ),
    Seam(
        "sglang.srt.managers.io_struct:hook_custom_types",
        "registry",
        "the control message between processes",
    ),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
        "subclass",
        "the CPU attention rwttt_cpu; what it does not compute is stock",
    ),
    Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod.apply",
        "override",
        "products of few rows beside rwttt_cpu",
    ),
    Seam(
        "sglang.srt.layers.quantization.unquant:UnquantizedEmbeddingMethod.apply",
        "override",
        "the same for the logits",
    ),
    Seam("sglang.srt.models.llama:LlamaForCausalLM", "subclass", "TTT llama checkpoints"),
    Seam("sglang.srt.models.qwen3:Qwen3ForCausalLM", "subclass", "TTT qwen3 checkpoints"),
    Seam(
        "sglang.srt.model_executor.model_runner_components.layer_setup:resolve_layer_indices",
        "call",
        "reads start_layer = end_layer of a TTT-Linear model: no layer has KV",
    ),
    Seam(
        "sglang.srt.layers.logits_processor:LogitsProcessor",
        "call",
        "logits of a TTT-Linear model",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.match_prefix",
        "override",
        "a hit needs the state at that point",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.checkpoint",
        "override",
        "keys carry the mode of each token",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.insert",
        "override",
        "keys carry the mode of each token",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.maybe_hand_to_session",
        "override",
        "an owner gets its row",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.on_release",
        "override",
        "an owner gives its row back",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.reset",
        "override",
        "flush drops the state with the KV",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler._handle_generate_request",
        "override",
        "admission and typed refusals",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler._create_generation_req",
        "override",
        "a request gets its lineage",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.process_input_requests",
        "override",
        "an owner whose request runs is not idle",
    ),
    Seam("sglang.srt.managers.scheduler:Scheduler.on_idle", "override", "metrics before a pause"),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.open_session",
        "override",
        "owners are opened by the control verb only",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.init_request_dispatcher",
        "override",
        "control verbs",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.run_batch",
        "override",
        "a failed owner's prefill does not go on",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler._release_aborted_request",
        "override",
        "an abort of a request that only waited is counted",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.process_pending_chunked_abort",
        "override",
        "how a prefill in chunks is stopped",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.update_running_batch",
        "override",
        "retraction when pages run out, and the planner's rows",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch:ScheduleBatch.check_decode_mem",
        "patch",
        "on one batch, for one call: pages are counted beside KV",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        "patch",
        "on one batch, for one call: put off until the planner has chosen its rows",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch:ScheduleBatch.filter_batch",
        "call",
        "on a copy: a forward pass of a part of the running batch",
    ),
    Seam(
        "sglang.srt.session.session_controller:SessionReqNode",
        "call",
        "a restored context stands in its session as a finished request",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
        "call",
        "KV of saved contexts is copied out of its buffers and into them",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.evict_to_free_tokens",
        "call",
        "room for the KV of a restored context",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.path_device_indices",
        "call",
        "where the KV of a context lies",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "override",
        "refusal of what can never fit",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.get_prefill_adder_class",
        "override",
        "admission counts pages",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.get_output_streamer_class",
        "override",
        'meta_info["state"]',
    ),
    Seam(
        "sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req",
        "override",
        "admission counts pages",
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler",
        "patch",
        "replaced by the subclass in the scheduler process of a TTT checkpoint",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.update_request_meta_info",
        "patch",
        'meta_info["state"] is one report, not a list per token',
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.open_session",
        "patch",
        "SGLang's own sessions are owners: the same limit, and an id that cannot be chosen",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.init_communicators",
        "patch",
        "verbs to one rank, and their answers",
    ),
    Seam(
        "sglang.srt.managers.data_parallel_controller:DataParallelController",
        "patch",
        "replaced by the subclass in the controller process of several data-parallel ranks",
    ),
    Seam(
        "sglang.srt.managers.data_parallel_controller:DataParallelController.init_dispatcher",
        "override",
        "verbs reach the owner's rank, and a rank that dies ends the server",
    ),
    Seam(
        "sglang.srt.managers.data_parallel_controller:DataParallelController"
        ".maybe_external_dp_rank_routing",
        "override",
        "an owner's requests reach its rank",
    ),
    Seam(
        "sglang.srt.utils.watchdog:SubprocessWatchdog",
        "call",
        "in the data-parallel controller, over the ranks",
    ),
    Seam(
        "sglang.srt.utils.common:get_cpu_ids_by_node",
        "call",
        "CPUs of each rank when there are more ranks than NUMA nodes",
    ),
    Seam(
        "sglang.srt.server_args:ServerArgs.add_cli_args",
        "patch",
        "--ttt-* flags on the command line",
    ),
    Seam(
        "sglang.srt.server_args:ServerArgs.from_cli_args",
        "patch",
        "--ttt-* flags reach the environment",
    ),
    Seam("sglang.srt.entrypoints.http_server:app", "patch", "the /ttt routes"),
)


def check_version() -> None:
    """Raise SeamError unless the installed SGLang is the pinned one."""
    found = version("sglang")
    if found != PINNED:
        raise SeamError(f"sgl_rwttt is pinned to sglang {PINNED}, but {found} is installed")


def resolve(target: str) -> object:
    """The object that ``module:attribute.path`` names; raises SeamError when it is missing."""
    module_name, _, path = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SeamError(
            f"sglang {PINNED} lacks {target}, which sgl_rwttt extends: {error}"
        ) from error
    return found


def check_seams(prefixes: tuple[str, ...] = ("sglang.",)) -> None:
    """Check the version and every seam whose target starts with one of ``prefixes``."""
    check_version()
    for seam in SEAMS:
        if seam.target.startswith(prefixes):
            resolve(seam.target)
