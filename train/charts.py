"""What a run's curves mean, and the charts that TensorBoard's page "custom scalars" makes of them.

A curve has one name everywhere: in TensorBoard, in metrics.jsonl, in Weights & Biases and in docs/tensorboard.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dccot.core.statistics import PERCENTILES

_MEANINGS = """
reward/correct | Share of training rollouts whose answer is right.
reward/well_formed | Share of training rollouts that keep every rule of the parallel format.
reward/mean | Mean reward of training rollouts, length penalty included.
reward/unparsable | Share of answers that the judge could not read; they count as wrong.
reward/unjudged | Share of answers that the judge gave up on, out of time or memory; they count as wrong.
validation/accuracy | pass@1 on held-out problems.
validation/accuracy_stderr | Its standard error over problems.
validation/longest_path | Longest path on held-out problems, in tokens.
validation/longest_path_stderr | Its standard error over problems.
validation/loss | SFT: negative log-prob per token of held-out demonstrations.
validation/* | As the curve of the same name of training rollouts, on held-out problems.
evaluation/*/accuracy | pass@1 on the benchmark, of a finished evaluation.
evaluation/*/longest_path | Longest path on the benchmark, in tokens, of a finished evaluation.
length/longest_path | Director and each fork's longest worker, in tokens: latency follows.
length/longest_path_correct | The same of right answers.
length/longest_path_incorrect | The same of wrong answers.
length/total_tokens | All tokens of a response.
length/truncated | Share of responses that hit the token limit before they gave an answer.
parallel/degree | Total tokens over longest path; 1: nothing runs in parallel, 3 workers can reach 3.
parallel/spawn_rate | Share of responses that spawn at least once.
parallel/rounds | Forks of the director, mean over responses.
parallel/width | Workers of a fork, mean.
parallel/width_max | Workers of a fork, most.
parallel/depth | Levels of workers below the director, mean over responses.
parallel/saved | Tokens that a fork takes off the longest path, mean.
parallel/paid_off | Share of forks that took tokens off the longest path.
parallel/worker_length | Tokens of a worker, mean.
parallel/worker_length_max | Tokens of a worker, most.
format/overshoot_* | Share of responses whose last token before a tag holds more than the tag.
format/* | Share of responses with this flaw first; the names are those of the rules in docs/method.md.
policy/loss | SFT: negative log-prob per token. RL: the objective, whose size says little.
policy/entropy | Mean entropy of the policy at sampled tokens, in nats; a fall to 0 ends exploration.
policy/entropy_p* | So many percent of sampled tokens have less entropy.
policy/kl | KL from the policy at the stage's start, per token (k3).
policy/grad_norm | Gradient norm before clipping, the largest of the step's updates.
policy/clip_fraction | Share of tokens whose ratio lies at the clip or cap.
policy/ratio_mean | Ratio of the policy to the one that sampled, mean over tokens.
policy/ratio_max | The same, largest.
policy/logprob | Mean log-prob of sampled tokens.
policy/learning_rate | Of the last update.
policy/skipped_updates | Updates left out because their gradient was not finite.
gap/kl | KL of trainer and rollout (k3) on the same tokens: should be near 0.
gap/kl_k1 | The same by the mean of the log-ratio.
gap/reverse_kl | KL in the other direction (k3).
gap/reverse_kl_k1 | The same by the mean of the log-ratio.
gap/mean_abs_logprob | Mean distance of trainer's and rollout's log-probs, in nats.
gap/max_abs_logprob | The largest distance.
gap/max_ratio | The largest ratio of trainer's to rollout's probability.
gap/fraction_over_2 | Share of tokens where that ratio is above 2 or below 1/2.
gap/perplexity_ratio | Trainer's perplexity over the rollout's of what was sampled: should be near 1.
gap/effective_sample_size | 1: correcting for the gap weighs all tokens alike.
gap/truncated | Share of tokens with trainer over rollout above rollout_ratio_cap.
gap/masked | Share of tokens in responses that rollout_correction leaves out.
gap/lag_* | As above, of tokens that were sampled so many versions ago.
staleness/mean | How many updates of the weights ago a trained token was sampled.
staleness/max | The same of the oldest token; at most rollout.max_staleness.
staleness/tokens_* | Share of trained tokens that were sampled so many updates ago.
pool/waiting | Groups complete and kept, not yet trained on.
pool/unfinished | Groups unfinished when the step's batch was full.
pool/started | Groups started in this step.
pool/too_old | Groups dropped for their age: 0 unless an engine had weights that it should not have had.
pool/* | Groups of the step in this state.
server_*/up | 1 while this server of the fleet answers.
server_*/calls | Calls that run on it.
server_*/version | The weights that it samples from.
data/epoch | Passes over the training problems.
data/kept | Groups that the filter kept, surplus ones included.
data/rollout_batches | Batches rolled out until enough groups were kept.
data/surplus | Groups kept beyond those trained on.
data/trained_reward | Mean reward of the responses trained on.
time/step | Seconds of the step.
time/engines_wait | Share of the step in which engines sampled nothing.
time/trainer_waits | Share of the step in which the trainer waited for groups.
time/checkpoint_waited | Seconds in which training waited for the checkpoint before.
time/checkpoint_written | Seconds until the last checkpoint was complete.
time/* | Seconds of the step in this phase.
speed/rollout_tokens | Tokens sampled per second of rollout.
speed/trained_tokens | Tokens per second of the step's updates.
speed/tflops | Useful TFLOP/s of the first rank in the updates.
speed/mfu | The same as a share of what a large matrix product reached on this device.
memory/* | GB on the first rank: of its process, or on a GPU the peak, of the step and of each phase.
checkpoint/failures | Checkpoints that could not be written so far.
"""
MEANINGS = [(name, about) for name, about in (line.split(" | ") for line in _MEANINGS.strip().splitlines())]


def meaning(name: str) -> str | None:
    """Of a curve; in MEANINGS a star stands for any part of a name, and the first line that fits counts.

    >>> meaning("format/no_spawn")
    'Share of responses with this flaw first; the names are those of the rules in docs/method.md.'
    """
    return next((about for known, about in MEANINGS if re.match(_pattern(known), name)), None)


def _pattern(name: str) -> str:
    return "^" + re.escape(name).replace(r"\*", ".+") + "$"


def legend(names: Iterable[str]) -> str:
    """A table for TensorBoard's page "text"."""
    rows = [f"| {name} | {meaning(name) or ''} |" for name in sorted(names)]
    return "\n".join(["| curve | meaning |", "|---|---|", *rows])


TIMES = ["rollout", "grade", "old_logprob", "reference", "update", "sync"]
LEARNING, HEALTH, TIME = "1 · Is it learning?", "2 · Is it healthy?", "3 · Where does the time go?"
LAYOUT = {  # TensorBoard's page "custom scalars": section → chart → curves
    LEARNING: {
        "Accuracy and form (training rollouts)": ["reward/correct", "reward/well_formed", "reward/mean"],
        "Longest path (tokens)": [f"length/longest_path{of}" for of in ("", "_correct", "_incorrect")],
        "Accuracy: validation and evaluations": ["validation/accuracy", "evaluation/*/accuracy"],
        "Longest path: validation and evaluations": ["validation/longest_path", "evaluation/*/longest_path"],
        "Parallelism: total tokens / longest path": ["parallel/degree"],
        "Share of responses that spawn": ["parallel/spawn_rate"],
    },
    HEALTH: {
        "Entropy: mean and percentiles over tokens": ["policy/entropy", *(f"policy/entropy_p{p}" for p in PERCENTILES)],
        "KL to the reference": ["policy/kl"],
        "Gradient norm": ["policy/grad_norm"],
        "Share of tokens at the clip": ["policy/clip_fraction"],
        "Rollout against trainer: KL": ["gap/kl"],
        "Rollout against trainer: effective sample size, truncated, masked": [
            "gap/effective_sample_size",
            "gap/truncated",
            "gap/masked",
        ],
        "Cut off by the budget": ["length/truncated"],
    },
    TIME: {
        "Seconds per phase": [f"time/{phase}" for phase in TIMES],
        "Tokens per second": ["speed/rollout_tokens", "speed/trained_tokens"],
        "Model FLOP utilisation": ["speed/mfu"],
        "Waiting, share of the step": ["time/engines_wait", "time/trainer_waits"],
        "Groups: queue, carried over, started": ["pool/waiting", "pool/unfinished", "pool/started", "pool/too_old"],
        "Staleness of trained tokens (versions)": ["staleness/mean", "staleness/max"],
        "Trained tokens by age (share)": [f"staleness/tokens_{age}_old" for age in range(5)],
    },
}
SFT_LAYOUT = {
    LEARNING: {"Loss per token: training and held-out": ["policy/loss", "validation/loss"]},
    HEALTH: {"Gradient norm": ["policy/grad_norm"], "Learning rate": ["policy/learning_rate"]},
    TIME: {"Tokens per second": ["speed/trained_tokens"], "Model FLOP utilisation": ["speed/mfu"]},
}


def arranged(names: Iterable[str]) -> dict:
    """The layout of RL or of SFT in TensorBoard's format, where curves are patterns."""
    layout = LAYOUT if any(name.startswith("reward/") for name in names) else SFT_LAYOUT
    shown = lambda curves: ["Multiline", [_pattern(name) for name in curves]]
    return {section: {chart: shown(curves) for chart, curves in charts.items()} for section, charts in layout.items()}
