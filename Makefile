# make setup | demo | test | check | bench
