"""Profiles that come with parplan: one file `NAME.json` per device, in the text that `parplan profile --export` writes.

They are read only, by `cost_models/profile/shipped.py`; what was measured on the machine at hand always comes before
them. NAME says what was measured and is shown as the figures' provenance; the file's conditions and times say how and
when. Only exports of measurements belong here, as they were written: no edited figures, no estimates. None is here yet.
"""
