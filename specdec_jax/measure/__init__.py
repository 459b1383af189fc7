"""Times and rates of decodes on the device at hand."""
