"""Planning: which tensors share a bucket, what that costs, and decisions during training.

- costs, fits: cost curves, and their fits to samples with confidence intervals.
- plans, colayers, merge: bucketing rules, with and without measurements.
- backward, measure, probe: the profile of a model and the costs of its exchanges.
- bucket_size, search_space, bayes, thresholds, trials, drift: tuning.
- control, controllers, merging: the decisions, applied to a training in progress.
- files, figures: the plan file, and figures of its content.
"""
