from __future__ import annotations

import hypothesis

# No limit on the time of an example: on a busy machine it would be the machine that is tested.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
