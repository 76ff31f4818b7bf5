"""What each figure in a report is, in words: the JSON carries them along."""

from __future__ import annotations

from wingbeat.bench import bound

NOTES = {
    "iteration_s": (
        "seconds from the moment the last worker starts an iteration until the last worker starts"
        " the next, so what is put off into the next forward counts; over all timed iterations"
    ),
    "ratio": "median iteration time over the first row's; below 1 is faster",
    "bytes_per_iteration": (
        "bytes one worker puts on its interfaces in an iteration, by the kernel's counters, which"
        " count the headers of each piece of up to 64 KB that TCP hands down; mean over workers"
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
        " iterations found that it is not faster; 'on and off' if rounds differ; null without one"
    ),
    "merge": (
        "what the row's plan of merged gradients says of itself on rank 0, in the first round that"
        " has one: its kind, the number of buckets and tensors, the predicted seconds of an"
        " iteration and of its parts, and the costs they come from; null where nothing is planned"
    ),
    "final_loss": "loss of the last timed iteration, mean over workers",
}
"""What each field of a run is."""
