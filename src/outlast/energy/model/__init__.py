"""Time and energy at every clock from what a step does and a few constants of the device."""
