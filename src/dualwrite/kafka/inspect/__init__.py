"""What a cluster and its topics are like, found out by requests that change nothing."""
