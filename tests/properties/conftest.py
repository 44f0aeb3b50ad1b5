from __future__ import annotations

from hypothesis import settings

from tests.properties import PROFILE

settings.load_profile(PROFILE)
