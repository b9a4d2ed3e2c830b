"""The schedules' runtimes: one device, pipeline, ring; versions of weights and delayed steps."""
