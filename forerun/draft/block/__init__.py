"""Block drafters: DFlash and DSpark."""
