"""halfulp: model compression and number formats, bit for bit."""
