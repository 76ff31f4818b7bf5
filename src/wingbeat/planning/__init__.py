"""Planning: which tensors share a bucket, what that costs, and decisions during training.

- costs, merge, plans: cost curves and their fits; bucketing rules, with and without measurements.
- backward, measure, probe: the profile of a model and the costs of its exchanges.
- trials, bucket_size, thresholds: tuning.
- control, controllers, merging: the decisions, applied to a training in progress.
- files, figures: the plan file, and figures of its content.
"""
