"""A reward in a file of its own, so that the worker process that calls it loads nothing else."""


def odd_sum(completion_ids, **_):
    """What a random policy gets half of the time."""
    return [float(sum(ids) % 2) for ids in completion_ids]
