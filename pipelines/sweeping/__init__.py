"""Running a sweep: the frozen plan, the queue that workers share, the workers, and the table at the end."""
