"""What is expected of each of torch's tests of DDP; docs/developers/ddp-suite.md shows this table.

A test applies if DDP itself passes it on the CPU in this harness, and if it does not ask for what
only DDP has inside.
"""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("allreduce", "dear")


@dataclass(frozen=True)
class Verdict:
    """``passes``; ``refused`` with ``words``; ``fails`` (to be mended) because of ``words``."""

    kind: str
    words: str = ""


@dataclass(frozen=True)
class Row:
    """What is expected of one test; ``why_not`` says why it does not apply, if so.

    ``note`` says what was put in the place of what a CPU has not. ``slow`` ones take seconds.
    """

    allreduce: Verdict | None = None
    dear: Verdict | None = None
    why_not: str = ""
    note: str = ""
    slow: bool = False

    @property
    def applies(self) -> bool:
        return not self.why_not

    def verdict(self, strategy: str) -> Verdict:
        found: Verdict | None = getattr(self, strategy)
        assert found is not None, strategy
        return found


PASSES = Verdict("passes")


def _both(verdict: Verdict, note: str = "", slow: bool = False) -> Row:
    return Row(verdict, verdict, note=note, slow=slow)


def _not(why: str) -> Row:
    return Row(why_not=why)


def _fails(reason: str) -> Verdict:
    return Verdict("fails", reason)


def _no_option(name: str) -> Row:
    words = f"distribute() got an unexpected keyword argument '{name}'"
    return _both(Verdict("refused", words))


_STREAMS = "DDP creates CUDA streams for it, so DDP itself fails here"
_MIXED = f"DDP's own `mixed_precision` (wingbeat: `autocast`); {_STREAMS}"
_IN_BACKWARD = f"the optimizer inside DDP's hooks; {_STREAMS}"
_IGNORED = "uses DDP's private `_set_params_and_buffers_to_ignore_for_model`"
_SYNC_BN = "tests SyncBatchNorm itself, which exists on GPUs only"
_LOGGED = "reads DDP's logging data"
_UNUSED = (
    "expects DDP's error about unused parameters without `find_unused_parameters`; wingbeat always "
    "supports them and raises no error"
)
_STATIC = "reads the static graph of DDP's reducer; wingbeat makes no assumption about the graph"
_MAPPING = "uses DDP's private mapping of parameters to names in debug output"
_BUFFER_HOOK = "uses DDP's private `_register_buffer_comm_hook`"
_PROFILED = "expects the names of DDP's own operations in a profile"

_TWICE = Verdict("refused", "is distributed already, as a part of")
"""The test wraps what is wrapped, which averages its gradients twice."""

_HOOK = "the hook is replaced by an option of the strategy: `compression=`"
_BN = "BatchNorm in SyncBatchNorm's place"

ROWS: dict[str, Row] = {
    "test_dump_DDP_relevant_env_vars": _not("prints environment variables; there is no model"),
    "test_DistributedDataParallelCPU": _both(PASSES),
    "test_DistributedDataParallelCPU_grad_is_view": _both(PASSES),
    "test_DistributedDataParallel_requires_grad": _both(PASSES),
    "test_ddp_zero_output_features": _both(PASSES),
    "test_ddp_create_graph": _both(
        Verdict("refused", "gradients that are exchanged have no graph"),
        "DDP's gradients have none either: the test only expects that nothing is raised",
    ),
    "test_DistributedDataParallel_non_default_stream": _not("tests CUDA streams"),
    "test_ddp_comm_hook_logging": _not(_LOGGED),
    "test_get_data_parallel_params": _not(_IGNORED),
    "test_ddp_apply_optim_in_backward": _not(_IN_BACKWARD),
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _not(_IN_BACKWARD),
    "test_ddp_apply_optim_in_backward_ignored_params": _not(_IN_BACKWARD),
    "test_ddp_native_mixed_precision_ignored_params": _not(_MIXED),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _not(_MIXED),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _not(_MIXED),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _not(_MIXED),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _not(_MIXED),
    "test_ddp_hook_parity_allreduce": _both(PASSES, _HOOK),
    "test_ddp_hook_parity_allreduce_process_group": _both(PASSES, _HOOK),
    "test_ddp_hook_parity_powerSGD": _both(PASSES, _HOOK),
    "test_ddp_hook_parity_post_localSGD": _not(
        "no strategy has an option for this hook; DDP itself fails here, because it requires GPUs"
    ),
    "test_DistributedDataParallel": _both(PASSES),
    "test_DistributedDataParallel_with_amp_and_grad_is_view": _both(PASSES),
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _both(PASSES, _BN),
    "test_DistributedDataParallel_SyncBatchNorm": _not(_SYNC_BN),
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _not(_SYNC_BN),
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _not(_SYNC_BN),
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _not(_SYNC_BN),
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _not(_SYNC_BN),
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _not(_SYNC_BN),
    "test_DistributedDataParallel_SyncBatchNorm_half": _both(PASSES, _BN),
    "test_ddp_logging_data_cpu": _not(_LOGGED),
    "test_ddp_logging_data_gpu": _not(_LOGGED),
    "test_ddp_bucket_cap_mb_list": _not("reads the sizes of DDP's buckets"),
    "test_static_graph_api_cpu": _not(f"{_STATIC}; the test changes it at any time"),
    "test_ddp_sync_module_states": _not(
        "tests torch's private `_sync_module_states`, with DDP's private attributes"
    ),
    "test_ddp_grad_div_uneven_inputs": _both(PASSES),
    "test_ddp_profiling_autograd_profiler": _not(_PROFILED),
    "test_ddp_profiling_torch_profiler": _not(_PROFILED),
    "test_ddp_profiling_execution_trace": _not("tests NCCL's metadata in a trace"),
    "test_ddp_join_model_equivalence": _both(PASSES),
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _both(PASSES, _BN),
    "test_ddp_uneven_inputs": _both(PASSES, _HOOK, slow=True),
    "test_ddp_uneven_input_join_disable": _both(PASSES),
    "test_ddp_uneven_input_exception": _both(PASSES),
    "test_ddp_ignore_params_arg": _not(_IGNORED),
    "test_ddp_unused_params_rebuild_buckets_exception": _not(_UNUSED),
    "test_ddp_shared_grad_acc_unused_params": _both(PASSES),
    "test_ddp_device": _not("tests moving inputs to a rank's GPU"),
    "test_ddp_namedtuple": _both(PASSES),
    "test_grads_same_across_ranks_with_no_sync": _both(PASSES),
    "test_ddp_control_flow_same_across_ranks": _not(
        f"reads the used parameters from DDP's reducer, and {_UNUSED}"
    ),
    "test_invalid_static_graph": _not(_STATIC),
    "test_ddp_control_flow_different_across_ranks": _not(
        f"reads the used parameters from DDP's reducer, and {_UNUSED}"
    ),
    "test_ddp_model_diff_shape_across_ranks": _both(PASSES),
    "test_ddp_model_diff_num_params_across_ranks": _both(PASSES),
    "test_undefined_grad_parity_unused_parameters": _both(PASSES),
    "test_ddp_build_debug_param_to_name_mapping": _not(_MAPPING),
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": _not(_MAPPING),
    "test_ddp_multiple_nested_unused_params_error": _not(_UNUSED),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _not(_IGNORED),
    "test_ddp_inference": _both(PASSES, _BN),
    "test_ddp_sync_bn_training_vs_eval": _not(_SYNC_BN),
    "test_ddp_python_error_logged": _not(_LOGGED),
    "test_ddp_static_graph_nested_types": _both(_TWICE),
    "test_ddp_returns_tensor_with_no_grad": _both(PASSES),
    "test_detect_ddp_is_actually_static": _not(_STATIC),
    "test_ddp_new_tensor_in_fwd": _both(PASSES),
    "test_ddp_new_tensor_in_fwd_static_graph": _both(PASSES),
    "test_ddp_buffer_hook_allreduce_return_future": _not(_BUFFER_HOOK),
    "test_ddp_buffer_hook_allreduce": _not(_BUFFER_HOOK),
    "test_ddp_broadcast_buffer_via_hook": _not(_BUFFER_HOOK),
    "test_ddp_remove_autograd_hooks": _both(PASSES, "`release` removes the hooks"),
    "test_ddp_has_finalized": _not("uses DDP's reducer; DDP itself fails, and torch skips it"),
    "test_ddp_broadcast_buffer": _both(PASSES),
    "test_ddp_join_respects_forward_sync_buffers_false": _no_option("forward_sync_buffers"),
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": _no_option(
        "forward_sync_buffers"
    ),
    "test_ddp_broadcast_buffers_deprecation_warning": _not(
        "tests the warning of one of DDP's own arguments"
    ),
    "test_static_graph_multi_forward": _both(PASSES),
    "test_sync_bn_logged": _not(_SYNC_BN),
    "test_stateless_api_with_ddp": _both(PASSES),
    "test_ddp_forward_backward_hook": _both(PASSES),
    "test_ddp_hook_pickling_powerSGD": _both(PASSES, _HOOK),
    "test_ddp_device_mesh_initialization": _no_option("device_mesh"),
    "test_ddp_compile_static_graph": _both(PASSES, slow=True),
    "test_ddp_sink_noclone": _both(PASSES),
}
"""By the tests' names, in the order in which torch has them (2.15)."""

DDP_ITSELF_HANGS = {"test_ddp_uneven_inputs": "2.11."}
"""Tests in which the DDP of an older torch (its version begins so) waits for ever on the CPU."""
