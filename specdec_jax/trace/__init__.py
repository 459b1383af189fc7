"""What a decode did, iteration by iteration: recorded, kept, shown."""
