"""Asserts of the cases say what they compared."""

import pytest

pytest.register_assert_rewrite("conformance", "driving")
