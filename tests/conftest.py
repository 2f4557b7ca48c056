"""Shapes and types in annotations are checked at every call while tests run."""

import hypothesis
from jaxtyping import install_import_hook

install_import_hook("gspo", "beartype.beartype")

# No deadline: a busy machine is not a failure.
hypothesis.settings.register_profile("gspo", deadline=None, max_examples=30)
hypothesis.settings.load_profile("gspo")
