"""Rules that a codec, an exchange or a schedule of your own is held to (`armillary.check`)."""
