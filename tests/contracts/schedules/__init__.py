"""All schedules speak one language: one suite."""
