"""Stand-in for ``sgl_kernel`` on machines without a GPU.

The published wheel of ``sgl_kernel`` needs libcuda to be imported. SGLang 0.5.23 imports the names
below when its modules load, even for ``device="cpu"``, but calls none of them in the features that
sgl_rwttt serves. Each raises when called, naming itself. A folder on ``PYTHONPATH`` is the only way
to have the module in place before the scheduler processes import SGLang.
"""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.4.10"  # the release this stands in for
STAND_IN = True


def _stand_in(name: str) -> Any:
    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this process runs on the CPU with sgl_rwttt's "
            "stand-in for sgl_kernel, which has no kernels. Turn off the feature that needs it "
            "(speculative decoding, the Inkling models), or run on a GPU with the real package."
        )

    call.__name__ = call.__qualname__ = name
    return call


copy_all_layer_kv_cache_cpu = _stand_in("copy_all_layer_kv_cache_cpu")
assign_req_to_token_pool_cpu = _stand_in("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _stand_in("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _stand_in("verify_tree_greedy_cpu")
fill_bonus_tokens_cpu = _stand_in("fill_bonus_tokens_cpu")
fill_accept_out_cache_loc_cpu = _stand_in("fill_accept_out_cache_loc_cpu")
assign_draft_cache_locs_contiguous_cpu = _stand_in("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _stand_in("assign_extend_cache_locs_cpu")
rmsnorm = _stand_in("rmsnorm")
