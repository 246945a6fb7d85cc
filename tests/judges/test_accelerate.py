"""accelerate's own test scripts, which are in its wheel, with tpukit in place of its Accelerator.

The names that a script imports from accelerate are replaced by those of accelerate_shim.py. Each of
its test functions runs on two CPU processes, or is not offered for a reason.
"""

import importlib
import inspect
import os

import pytest
import torch
from helpers.launching import quietly
from torch.utils.data import DataLoader

from tpukit import WorkerError

pytest.importorskip("accelerate")
pytest.importorskip("evaluate", reason="a script imports it")
from judges import accelerate_shim  # noqa: E402

pytestmark = [pytest.mark.judges, pytest.mark.filterwarnings("ignore")]

SCRIPTS = "accelerate.test_utils.scripts"
EVEN = "all cores make the same number of steps, and each batch has the same shape"
ORDER = "core.batches has its own order, not that of the user's sampler or generator"
SPLIT = "core.batches divides a dataset; lists and dicts are not divided"
ACCUMULATE = "Core has no accumulate(); fit(accumulate_grad_batches=2) accumulates"
STATEFUL = "batches have no state of their own; the checkpoints of fit hold the position"
RENDEZVOUS = "launch has one way in which processes meet, and no rdzv_backend"
DOWNLOAD = "it downloads a model and a dataset"
STREAM = "a dataset that is read in order needs the number of steps; it has no last short batch"
PREPARE = "Core has no loader for one process that dispatches batches to the others"

# By script, each of its test functions: how it runs, or why it is not offered.
RUNS = "on two cores"
NOTEBOOK = "in the notebook"
FUNCTIONS = {
    "test_notebook": {
        "test_can_initialize": NOTEBOOK,
        "test_clean_cuda_fork": NOTEBOOK,
        "test_static_rdzv_backend": RENDEZVOUS,
        "test_c10d_rdzv_backend": RENDEZVOUS,
        "test_fault_tolerant": "launch does not restart a function that raised an error",
        "test_monitoring": NOTEBOOK,
        "test_problematic_imports": "bitsandbytes needs CUDA",
    },
    "test_ops": {
        "test_gather": RUNS,
        "test_gather_object": RUNS,
        "test_gather_non_contiguous": RUNS,
        "test_broadcast": RUNS,
        "test_pad_across_processes": "tensors of a collective have one shape; buckets pad batches",
        "test_reduce_sum": RUNS,
        "test_reduce_mean": RUNS,
        "test_reduce_max": RUNS,
        "test_op_checker": "it checks pad_across_processes and the state of accelerate",
        "test_copy_tensor_to_devices": "the script leaves it out on CPU processes",
    },
    "test_sync": {
        "test_noop_sync": "on one core",
        "test_distributed_sync": RUNS,
        "test_distributed_sync_multiple_fwd": RUNS,
        "test_gradient_accumulation": ACCUMULATE,
        "test_gradient_accumulation_with_opt_and_scheduler": ACCUMULATE,
        "test_dataloader_break": "batches have no list of active loaders",
    },
    "test_distributed_data_loop": {
        "test_default_ensures_even_batch_sizes": RUNS,
        "test_can_disable_even_batches": EVEN,
        "test_can_join_uneven_inputs": EVEN,
        "test_join_raises_warning_for_non_ddp_distributed": EVEN,
        "test_join_can_override_even_batches": EVEN,
        "test_join_can_override_for_mixed_type_dataloaders": EVEN,
        "test_join_raises_warning_for_iterable_when_overriding_even_batches": EVEN,
        "test_pickle_accelerator": "a Core belongs to its process, and is not pickled",
        "test_data_loader": RUNS,
        "test_stateful_dataloader": STATEFUL,
        "test_stateful_dataloader_save_state": STATEFUL,
    },
    "test_script": {
        "process_execution_check": "Core has no decorators; `if core.is_main` and core.barrier()",
        "init_state_check": "it prints the state of accelerate",
        "rng_sync_check": "random numbers come from seeds, core.same_seed(), not from states",
        "dl_preparation_check": ORDER,
        "central_dl_preparation_check": PREPARE,
        "custom_sampler_check": ORDER,
        "check_seedable_sampler": ORDER,
        "check_seedable_sampler_in_batch_sampler_shard": ORDER,
        "check_seedable_sampler_with_data_seed": ORDER,
        "training_check": ORDER,
        "test_split_between_processes_dataset": SPLIT,
        "test_split_between_processes_list": SPLIT,
        "test_split_between_processes_nested_dict": SPLIT,
        "test_split_between_processes_tensor": SPLIT,
        "test_split_between_processes_evenly": SPLIT,
        "test_trigger": "Core has no trigger; core.all_reduce(flag, 'max') is one",
        "test_reinstantiated_state": "it resets the state of accelerate",
    },
    "external_deps.test_metrics": {
        "test_torch_metrics": RUNS,
        "test_mrpc": DOWNLOAD,
        "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset": STREAM,
        "test_gather_for_metrics_with_iterable_dataset": STREAM,
        "test_gather_for_metrics_drop_last": RUNS,
    },
}
OFFERED = (RUNS, NOTEBOOK, "on one core")
CASES = [(script, name) for script, functions in FUNCTIONS.items() for name in functions]


@pytest.fixture
def script(request, monkeypatch):
    """Import a script of accelerate, with the shim in place of accelerate."""
    monkeypatch.setitem(os.environ, "ACCELERATE_NUM_PROCESSES", "2")
    module = importlib.import_module(f"{SCRIPTS}.{request.param}")
    for name, thing in vars(accelerate_shim).items():
        is_own = getattr(thing, "__module__", "") == accelerate_shim.__name__
        if is_own and hasattr(module, name):
            monkeypatch.setattr(module, name, thing)
    # accelerate's own function would start the XLA runtime.
    monkeypatch.setattr(module, "set_seed", torch.manual_seed, raising=False)
    monkeypatch.setattr(module, "ChildFailedError", WorkerError, raising=False)
    return module


def call(core, script, name):
    """Call a test function with the arguments that its script passes."""
    function = getattr(script, name)
    known = {"state": accelerate_shim.PartialState, "accelerator": accelerate_shim.Accelerator}
    parameters = inspect.signature(function).parameters
    arguments = {key: make() for key, make in known.items() if key in parameters}
    if "data_loader" not in parameters:
        function(**arguments)
        return
    for shuffle in (False, True):
        loader = DataLoader(script.DummyDataset(), batch_size=script.BATCH_SIZE, shuffle=shuffle)
        function(loader, **arguments)


@pytest.mark.parametrize(("script", "name"), CASES, indirect=["script"])
def test_a_function_of_accelerates_scripts(script, name, request):
    how = FUNCTIONS[request.node.callspec.params["script"]][name]
    if how not in OFFERED:
        pytest.skip(f"not offered: {how}")
    if how == NOTEBOOK:
        getattr(script, name)()
        return
    cores = 1 if how == "on one core" else 2
    quietly(call, script, name, cores=cores, backend="cpu")


@pytest.mark.parametrize("script", FUNCTIONS, indirect=True)
def test_no_function_of_a_script_is_left_out(script, request):
    found = [
        name
        for name, thing in vars(script).items()
        if inspect.isfunction(thing) and thing.__module__ == script.__name__
    ]
    tests = {name for name in found if name.startswith("test_") or "check" in name}
    helpers = {"check_model_parameters", "assert_clean_cuda_fork_function"}
    assert tests - helpers == FUNCTIONS[request.node.callspec.params["script"]].keys()
