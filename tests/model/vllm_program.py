"""Opens checkpoints in vLLM one after another and prints the ids it decodes greedily, as one line of JSON.

python tests/model/vllm_program.py '[[1, 2, 3], [4, 5]]' <checkpoint> ...
"""

import gc
import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def decode(checkpoint: str, prompts: list[list[int]], tokens: int = 64) -> list[list[int]]:
    engine = LLM(checkpoint, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return ids


if __name__ == "__main__":
    prompts = json.loads(sys.argv[1])
    print(json.dumps({checkpoint: decode(checkpoint, prompts) for checkpoint in sys.argv[2:]}))
