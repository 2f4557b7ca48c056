"""Shapes and types in annotations are checked at every call while tests run."""

import os

import hypothesis
from jaxtyping import install_import_hook

install_import_hook("gspo", "beartype.beartype")

# No deadline: a busy machine is not a failure. In CI the same examples every time: a red run can be run again.
hypothesis.settings.register_profile(
    "gspo", deadline=None, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("gspo"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "gspo")
