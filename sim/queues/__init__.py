"""Who is next in the waiting queue."""
