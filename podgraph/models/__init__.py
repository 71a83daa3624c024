"""A model's ``config.json`` (Hugging Face's keys) -> the text of a build configuration.

Every value is either taken over or refused by name: a mask, a scale or a head that the kernels do not compute must not
turn into a catalog that computes something else.
"""

from podgraph.models.write import config_for_model, config_from_file

__all__ = ["config_for_model", "config_from_file"]
