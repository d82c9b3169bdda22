"""The overlap engine: loop, buffer, schedules, scoring desk, state. Runs on fakes; knows no model."""
