"""What is known of jobs: their objects as the API server holds them, their conditions, and what is wrong with them."""
