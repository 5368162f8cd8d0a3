"""Models of sound: a waveform, or its spectrogram, as a float sequence."""

from __future__ import annotations

from typing import Any

from lipaudit.errors import InputError

WAVEFORM, SPECTROGRAM = "input_values", "input_features"
SECOND = 16_000
"""Samples of one second, at the rate that every one of these models was trained at."""
FRAMES = 100
"""Frames of one second, where the length of a spectrogram is free."""


def sound_shape(module: Any) -> tuple[int, ...]:
    """Return the shape of one sample: (samples,), (frames, bands) or (bands, frames).

    Raises:
        InputError: the configuration does not say.
    """
    config, takes = module.config, module.main_input_name
    bands, positions = (_positive(config, k) for k in ("num_mel_bins", "max_source_positions"))
    if takes == WAVEFORM and hasattr(config, "frequency_stride"):  # patches of a spectrogram
        return config.max_length, config.num_mel_bins
    if takes == WAVEFORM:
        return (SECOND,)
    if bands and positions:  # as Whisper: bands first, two frames to a position
        return bands, 2 * positions
    width = _positive(config, "feature_projection_input_dim") or _positive(
        config, "input_feat_per_channel"
    ) * (_positive(config, "input_channels") or 1)
    if width or bands:
        return FRAMES, width or bands
    raise InputError(
        f"{type(module).__name__} takes {takes}, of a shape that its configuration does not say",
        "Write a py: factory that returns ModelSpec(module, (frames, bands), kind='tokens').",
    )


def _positive(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0
