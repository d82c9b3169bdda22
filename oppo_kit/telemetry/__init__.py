"""What is recorded beside a run: time, utilisation, and the trackers that it is sent to."""
