"""Descriptions of each figure of a report, included in its JSON."""

from __future__ import annotations

from wingbeat_lab.bench import bound, clocks
from wingbeat_lab.bench.config import LOSSES
from wingbeat_lab.bench.traffic import WINDOW_S

NOTES = {
    "iteration_s": (
        "seconds from the moment the last worker starts an iteration until the last worker starts"
        " the next, so what is put off into the next forward counts; over all timed iterations"
    ),
    "typical_s": (
        "seconds of an iteration: the median, and for strategies without lockstep the mean, as"
        " several may come at once after a long wait; what follows is made from it"
    ),
    "ratio": "iteration time over the first row's; below 1 is faster",
    "ratio_to_best_ddp": (
        "iteration time over that of the fastest row of DistributedDataParallel, whatever"
        " its hook, as fp32 DDP alone is a weak opponent; null without such a row. The fastest may"
        " be one that is not exact: see exact"
    ),
    "samples_by_rank_s": (
        "seconds of each worker's timed iterations by its own clock, from its start of one to its"
        " start of the next"
    ),
    "iterations_per_s": (
        "by_rank: a worker's timed iterations over the seconds that it took for them; total: their"
        " sum. Without lockstep (canary) an iteration is as many gradients as all workers make in"
        " one, once they are applied. Where models are averaged (ripples, adpsgd, localsgd, diloco)"
        " an iteration is over when all workers together have made as many steps as there are"
        " workers, whoever made them: fast ones go on, and a turn ends when there are enough. All"
        " ranks then have the same times; see steps_by_rank"
    ),
    "steps_by_rank": (
        "where models are averaged: how many of the steps in the timed iterations each worker has"
        " made; null for other rows. A step counts when the optimizer's step has returned, so with"
        " the wait for its average where it has one"
    ),
    "fired_by_rank": (
        "under bounded staleness (canary): how often the bound has acted on each worker in timed"
        " iterations: iterations dropped before all of their colayers were sent, and parameters"
        " pulled from another worker in place of rounds that were let go; null for other rows"
    ),
    "cpu_s_per_iteration": (
        "by role of a process and in it by rank: CPU seconds of all its threads, in user mode and"
        " in the kernel, over the timed iterations, for each of them; server: all parameter servers"
        " that the worker has started"
    ),
    "cores_share": (
        "CPU seconds of all processes of the row over the timed iterations / (machine.cores x"
        " seconds from the first worker's start to the last one's end). What the kernel does for"
        " the links outside of any process is not in it"
    ),
    "limited_by_cores": (
        f"cores_share is {clocks.CORES_FULL:g} or more: the row waits for this machine's cores, and"
        " hosts of their own would be faster"
    ),
    "bytes_per_iteration": (
        "bytes one worker puts on its interfaces in an iteration, by the kernel's counters, which"
        " count the headers of each piece of up to 64 KB that TCP hands down, and all processes of"
        " a host whatever their role; mean over workers. Where models are averaged, without what it"
        " takes to make them equal at the end of a turn"
    ),
    "class_bytes_per_iteration": (
        "the same by priority class of the lab's links (ef: DSCP 46; be: best effort), as on the"
        " wire, the headers of every segment included; empty without classes"
    ),
    "traffic": (
        "with --traffic: what hosts send as a share of their links' rates, by the kernel's counters"
        f" in windows of {WINDOW_S:g} s without slow motion (windows_s with it): mean over all of"
        " the timed iterations, peak of the busiest window of any host, series: mean over hosts"
    ),
    "cross_traffic": (
        "with cross-traffic on the lab's trunks (--cross-traffic, or cross= in its line): what"
        " the hosts it flows to have received in the row's timed iterations, by the kernel's"
        " counters (bytes, all together), what one direction of one trunk carried of it in each"
        " iteration (bit_per_s; headers of each piece of up to 64 KB once), and how many cores its"
        " generators used in user and kernel mode; null without"
    ),
    "exposed_s": (
        "median iteration time minus the time to compute: forward + backward of a paced model,"
        " the row 'single' for a real one (null without that row)"
    ),
    "bound_s": "no schedule of the row's kind can be faster; formula in the run; " + bound.TERMS,
    "fraction_of_bound": "bound_s / median iteration time; 1 is perfect",
    "measured": (
        "in this run, once a round: t_ff_s, t_bp_s of the model alone (no optimizer, all workers at"
        " once, the slowest one's median); t_rs_s, t_ag_s of all gradients handed over at once with"
        " nothing else running (until the last worker has its result; as one buffer or in buckets,"
        " whichever median is less); bound_s = max(t_ff, t_ag) + max(t_bp, t_rs);"
        " s_max = P (t_ff + t_bp) / bound_s: DeAR (Zhang et al., 2023), Eq. 6"
    ),
    "speedup": "P (t_ff + t_bp) / median iteration time, P workers against one; S in Table II",
    "bound_measured_s": "measured.bound_s, the same for all rows; null for 'single'",
    "fraction_of_s_max": (
        "speedup / s_max = bound_measured_s / median iteration time. A row that sends less than"
        " every gradient in full may exceed 1; null for 'single', which exchanges nothing"
    ),
    "breakdown": (
        "with --breakdown: 'whole' is the iteration of median length of a few recorded after the"
        " timed ones, mean over workers; *_s are its parts and add up to it. Waiting counts as"
        " reduce_scatter_s while one of the worker's reduce-scatters is under way, else as"
        " all_gather_s (all_reduce_s where gradients travel in all-reduces). 'RS-only' and"
        " 'AG-only' leave the other half of the exchange out, for timing only: DeAR, Fig. 8"
    ),
    "codec": (
        "whether gradients went through the row's codec: 'off' where the trial before the timed"
        " iterations found that it is not faster; null without one"
    ),
    "merge": (
        "what the row's plan of merged gradients says of itself on rank 0, in the first round that"
        " has one: its kind, the number of buckets and tensors, the predicted seconds of an"
        " iteration and of its parts, the costs they come from, what was measured (measured_s)"
        " and which plans a trial has compared (tried, the chosen first); null where nothing is"
        " planned"
    ),
    "deciding": (
        "what it took until a row that tunes, tries or plans had decided how it trains: iterations,"
        " their seconds by rank 0's clock, and the decision; null for other rows. It is done once,"
        " on a model of its own before the row's first turn. All rounds begin with the decision and"
        " from the same weights as any other row, and no other figure contains any of it. Plans of"
        " merged gradients are kept until times drift. bucket_bytes: of the model as it is scaled"
    ),
    "normal_iteration_s": (
        "with --slow, of the report: what a slow worker sleeps a multiple of, between two"
        " iterations, before its forward and in addition to its work (Ripples, Luo et al., 2019,"
        " section 7.4). It is the computation alone, forward + backward, and not what the row would"
        " take without slow workers: so it is the same for all rows and known before. A paced model"
        " states it; a real one's is measured once, with all workers at once, the slowest one's"
        " median. Without a range, warm-up and deciding are slowed too. Bounds and measured times"
        " know nothing of slow workers. What these cost is part of exposed_s, unless against"
        " the row 'single', which is slowed as well"
    ),
    "time_to_loss": (
        f"with --target-loss: seconds of training until the mean loss of the last {LOSSES}"
        " iterations, mean over workers, is below the target. Warm-up and timed iterations both"
        " count, each worker's by its own clock, until the last worker is there; deciding does not,"
        " nor the pause in which bytes are counted. Each round trains anew: seconds is the median"
        " over the rounds, null unless the target was reached in all of them"
    ),
    "final_loss": "loss of the last timed iteration, mean over workers",
}
"""The description of each field of a run."""
