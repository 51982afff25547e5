"""What all tests of this folder share."""

from tests.collecting import _looked_at_once, pytest_collection_modifyitems  # noqa: F401  for every file
