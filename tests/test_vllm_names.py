"""Every name and argument of vLLM that we use beyond its public API, so that an upgrade says at once what broke, and
all of it.

Arguments of calls are read from our own sources; attributes of objects are looked for in the classes that assign them.
The last test keeps the list whole: a new import from vLLM that is not pinned here fails it.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from dccot.lab.worlds import bigram
from dccot.rollout.director import Call
from dccot.rollout.engine import EngineConfig, Sampling, as_flags, engine_options, vllm_options
from dccot.rollout.response import Finish
from dccot.rollout.servers import command
from dccot.serve.responses import ECHOED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("rollout/*.py"), *ROOT.glob("serve/*.py")])

# module:name → arguments that we give by name, or in this order
CALLED = {
    "vllm:SamplingParams": (),
    "vllm.inputs:tokens_input": ("prompt_token_ids",),
    "vllm.engine.arg_utils:EngineArgs": (),
    "vllm.v1.engine.llm_engine:LLMEngine.from_engine_args": ("engine_args",),
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ("request_id", "prompt", "params", "priority"),
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ("request_ids",),
    "vllm.v1.engine.llm_engine:LLMEngine.step": (),
    "vllm.v1.engine.llm_engine:LLMEngine.get_tokenizer": (),
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": (),
    "vllm.v1.engine.llm_engine:LLMEngine.sleep": ("level", "mode"),
    "vllm.v1.engine.llm_engine:LLMEngine.set_weight_version": ("weight_version",),
    "vllm.v1.engine.core:EngineCore.pause_scheduler": ("mode", "clear_cache"),
    "vllm.v1.engine.core:EngineCore.resume_scheduler": (),
    "vllm.v1.engine.llm_engine:LLMEngine.wake_up": ("tags",),
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ("method", "kwargs"),
    "vllm.v1.engine.core:EngineCore.shutdown": (),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.shutdown": (),
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": (),
    "vllm.v1.worker.cpu_worker:CPUWorker.reload_weights": ("weights_iterator",),
    "vllm.v1.worker.gpu_worker:Worker.reload_weights": ("weights_iterator",),
    "vllm.v1.worker.gpu_worker:Worker.sleep": ("level",),
    "vllm.v1.worker.gpu_worker:Worker.wake_up": ("tags",),
    "vllm.v1.worker.gpu_worker:Worker.get_model": (),
    "vllm.v1.worker.cpu_worker:CPUWorker.get_model": (),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": ("layer", "x"),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": ("layer", "x"),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading": (
        "layer",
    ),
    "vllm.engine.protocol:EngineClient.generate": ("prompt", "sampling_params", "request_id", "priority"),
    "vllm.engine.protocol:EngineClient.check_admission": (),
    "vllm.entrypoints.serve.utils.api_utils:listen_for_disconnect": ("request",),
    "vllm.entrypoints.serve.utils.api_utils:cli_env_setup": (),
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": ("parser",),
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args": ("args",),
    "vllm.entrypoints.cli.serve:ServeSubcommand.cmd": ("args",),
    "vllm.utils.argparse_utils:FlexibleArgumentParser": (),
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router": ("app",),
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state": ("engine_client", "state", "args"),
    "vllm.exceptions:GracefulHTTPError": ("message", "http_status"),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record": (
        "scheduler_stats",
        "iteration_stats",
        "mm_cache_stats",
        "engine_idx",
    ),
    "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware": ("app", "tokens"),
    "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.verify_token": ("headers",),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models": (),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ("timeout",),
    "vllm.entrypoints.generate.base.protocol:DeltaMessage": (),
    "vllm.entrypoints.serve.engine.protocol:OpenAIBaseModel": (),
    "vllm.entrypoints.openai.responses.protocol:InputTokensDetails": ("cached_tokens", "cache_write_tokens"),
    "vllm.entrypoints.openai.responses.protocol:OutputTokensDetails": ("reasoning_tokens",),
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": ("input", *ECHOED),
    "vllm.entrypoints.openai.responses.protocol:ResponsesResponse.from_request": (
        *("request", "sampling_params", "model_name", "created_time", "output", "status", "usage"),
    ),
    "vllm.entrypoints.openai.responses.protocol:ResponseUsage": (
        *("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"),
    ),
    "vllm.entrypoints.openai.responses.streaming_events:SimpleStreamingEventProcessor.emit_delta": (
        *("delta_message", "output"),
    ),
    "vllm.entrypoints.openai.responses.streaming_events:SimpleStreamingEventProcessor.open": ("target_state",),
    "vllm.entrypoints.openai.responses.streaming_events:SimpleStreamingEventProcessor.close_current": (),
    "vllm.entrypoints.openai.responses.streaming_events:SimpleStreamingEventProcessor.resolve_target_state": (),
    # asynchronous rollouts: our weight backend, and the routes that rollout/training_fleet.py asks
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.parse_update_info": ("update_dict",),
    "vllm.distributed.weight_transfer.base:WeightTransferInitInfo": (),
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo": (),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": (),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": ("model", "model_config"),
    "vllm.distributed.weight_transfer.nccl_common:trainer_init": ("init_info",),
    "vllm.distributed.weight_transfer.nccl_common:NCCLWeightTransferInitInfo": (
        "master_address",
        "master_port",
        "world_size",
        "rank_offset",
        "packed",
    ),
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferUpdateInfo": ("names", "dtype_names", "shapes"),
    "vllm.distributed.weight_transfer.packed_tensor:packed_nccl_broadcast_producer": (
        "iterator",
        "group",
        "src",
        "post_iter_func",
    ),
    "vllm.entrypoints.rl.online.api_router:init_weight_transfer_engine": ("init_info",),
    "vllm.entrypoints.rl.online.api_router:shutdown_weight_transfer_engine": (),
    "vllm.entrypoints.rl.online.api_router:get_world_size": (),
    "vllm.entrypoints.rl.online.api_router:pause_generation": ("mode", "clear_cache"),
    "vllm.entrypoints.rl.online.api_router:resume_generation": (),
    "vllm.entrypoints.rl.online.api_router:start_weight_update": (),
    "vllm.entrypoints.rl.online.api_router:update_weights": ("update_info",),
    "vllm.entrypoints.rl.online.api_router:finish_weight_update": ("weight_version",),
    "vllm.entrypoints.rl.online.api_router:weight_info": (),
    "vllm.entrypoints.rl.online.api_router:weight_checker": ("action",),
}
# module:class → attributes that we read
READ = {
    "vllm.v1.engine.llm_engine:LLMEngine": ("engine_core", "model_config", "model_executor", "output_processor"),
    "vllm.v1.engine.core_client:InprocClient": ("engine_core", "_finalizer"),
    "vllm.v1.engine.core:EngineCore": ("model_executor", "scheduler"),
    "vllm.v1.core.sched.scheduler:Scheduler": ("running",),
    "vllm.v1.engine.core_client:BackgroundResources": ("engine_dead", "engine_manager"),
    "vllm.v1.engine.utils:CoreEngineProcManager": ("processes",),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": ("driver_worker",),
    "vllm.v1.worker.worker_base:WorkerWrapperBase": ("worker",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
    "vllm.v1.engine.output_processor:RequestState": ("external_req_id", "detokenizer"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": ("output_token_ids",),
    "vllm.outputs:RequestOutput": ("request_id", "outputs", "num_cached_tokens"),
    "vllm.outputs:CompletionOutput": ("token_ids", "logprobs", "finish_reason", "stop_reason", "weight_versions"),
    "vllm.outputs:WeightVersionSpan": ("version", "start", "end"),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": ("model", "model_config"),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": ("_registry",),
    "vllm.entrypoints.openai.responses.streaming_events:SimpleStreamingEventProcessor": ("state", "output_items"),
    "vllm.entrypoints.openai.responses.streaming_events:SimpleStreamingState": ("accumulated_logprobs",),
    "vllm.config:VllmConfig": ("shutdown_timeout",),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest": (
        "token_ids",
        "sampling_params",
        "priority",
        "model",
    ),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensChoice": (
        "token_ids",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "weight_versions",
    ),
    "vllm.logprobs:FlatLogprobs": ("logprobs",),
    "vllm.config:ModelConfig": ("max_model_len", "dtype"),
    "vllm.sampling_params:RequestOutputKind": ("FINAL_ONLY", "DELTA"),
    "vllm.model_executor.layers.linear:LinearBase": ("quant_method",),
    "vllm.model_executor.layers.linear:ColumnParallelLinear": ("input_size_per_partition",),
    "vllm.model_executor.layers.linear:RowParallelLinear": ("input_size_per_partition",),
    "vllm.model_executor.models.qwen2:Qwen2ForCausalLM": ("packed_modules_mapping", "lm_head"),
    "vllm.model_executor.models.qwen3:Qwen3ForCausalLM": ("packed_modules_mapping", "lm_head"),
    "vllm.model_executor.models.llama:LlamaForCausalLM": ("packed_modules_mapping", "lm_head"),
    "vllm.engine.protocol:EngineClient": ("model_config", "vllm_config", "renderer"),
    "vllm.platforms:current_platform": ("is_cpu",),
    "vllm.config:SchedulerConfig": ("policy", "max_num_seqs"),
    "vllm.v1.engine.async_llm:AsyncLLM": ("logger_manager",),
    "vllm.v1.metrics.loggers:StatLoggerManager": ("stat_loggers",),
    "vllm.v1.metrics.stats:SchedulerStats": ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage"),
    "vllm.v1.metrics.stats:IterationStats": ("inter_token_latencies_iter", "time_to_first_tokens_iter"),
    "vllm.v1.metrics.stats:RequestStateStats": ("first_token_latency",),
}
ENVIRONMENT = (
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CONFIGURE_LOGGING", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS",
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY",
)  # fmt: skip


@functools.cache
def find(where: str) -> object:
    module, _, names = where.partition(":")
    return functools.reduce(getattr, names.split("."), import_module(module))


def problem(where: str, arguments: tuple[str, ...]) -> str | None:
    """What is missing of a callable, in words; None if nothing is."""
    try:
        parameters = [name for name in inspect.signature(find(where)).parameters if name != "self"]  # type: ignore[arg-type]
    except (ImportError, AttributeError) as error:
        return f"{where}: {error}"
    if missing := [name for name in arguments if name not in parameters and "kwargs" not in parameters]:
        return f"{where}: no argument {', '.join(missing)} among {', '.join(parameters)}"
    return None


def attributes(where: str) -> set[str]:
    """Of instances of a class: members, fields, and what it or a parent assigns to self."""
    owner = find(where)
    found = set(dir(owner))
    for parent in getattr(owner, "__mro__", ())[:-1]:
        found |= set(getattr(parent, "__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
        except (OSError, TypeError, SyntaxError):
            continue
        found |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
    return found


def keywords(function: str) -> set[str]:
    """Arguments that our sources give to `function` by name."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    ]
    return {word.arg for call in calls for word in call.keywords if word.arg}


def test_what_we_call_is_there_and_takes_what_we_give_it():
    assert not [said for where, arguments in CALLED.items() if (said := problem(where, arguments))]


def test_what_we_read_is_there():
    assert not [
        f"{where} has no {name}" for where, names in READ.items() for name in names if name not in attributes(where)
    ]


def test_the_first_arguments_are_in_the_order_in_which_we_give_them():
    for where, count in {
        "vllm.v1.engine.llm_engine:LLMEngine.add_request": 3,
        "vllm.v1.engine.llm_engine:LLMEngine.abort_request": 1,
        "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": 1,
        "vllm.engine.protocol:EngineClient.generate": 3,
    }.items():
        parameters = [name for name in inspect.signature(find(where)).parameters if name != "self"]  # type: ignore[arg-type]
        assert tuple(parameters[:count]) == CALLED[where][:count], where


def test_settings_that_we_give_exist():
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    call = Call((), 0, [1], [], ("<spawn_workers>",), 1, Finish.BUDGET)
    rule = Sampling(bigram.tokenizer("single")).parameters(call, seed=0, temperature=1.0, top_p=1.0)
    for known, given in (
        (
            {field.name for field in dataclasses.fields(EngineArgs)},
            keywords("EngineArgs") | {*engine_options(EngineConfig(), False)},
        ),
        (set(SamplingParams.__struct_fields__), keywords("SamplingParams") | {*rule}),
    ):
        assert len(given) > 8 and given <= known, given - known


def test_choices_that_we_make_exist():
    from vllm.config import ModelConfig, SchedulerConfig
    from vllm.v1.executor.abstract import SLEEP_TAGS

    assert "processed_logprobs" in str(get_type_hints(ModelConfig)["logprobs_mode"])
    assert "priority" in str(get_type_hints(SchedulerConfig)["policy"])
    assert {"weights", "kv_cache"} == SLEEP_TAGS


def test_variables_that_we_set_are_read():
    from vllm import envs

    assert not set(ENVIRONMENT) - set(envs.environment_variables)


def test_options_that_our_servers_are_given_are_known():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)
    for on_gpu in (True, False):
        more = ["--tokenizer", "--served-model-name", "--uvicorn-log-level", "--disable-uvicorn-access-log"]
        more += ["--shutdown-timeout", "--allowed-origins", "--api-key"]
        ours = command("m", EngineConfig(), host="h", port=1, on_gpu=on_gpu)
        given = {flag for flag in [*as_flags(vllm_options(on_gpu)), *more, *ours] if flag.startswith("--")}
        assert given <= known, given - known


def test_nothing_is_imported_from_vllm_that_is_not_pinned_here():
    pinned = {where.partition(":")[0] + ":" + where.partition(":")[2].split(".")[0] for where in [*CALLED, *READ]}
    imported = {
        f"{node.module}:{alias.name}": f"{file.name}:{node.lineno}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imported) > 10
    assert not {name: where for name, where in imported.items() if name not in pinned}
