#!/bin/sh
# Ask with curl: a completion, a stream, and a mistake with the error that it gets.
set -e
url=http://127.0.0.1:8000
model=$(curl -s "$url/v1/models" | sed 's/.*"id":"\([^"]*\)".*/\1/')

curl -s "$url/v1/completions" -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "prompt": "One, two, three,", "max_tokens": 6, "temperature": 0}'
echo

curl -sN "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
    "model": "'"$model"'", "stream": true, "max_tokens": 6, "temperature": 0,
    "messages": [{"role": "user", "content": "Hello!"}]
}'

curl -s "$url/v1/completions" -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "prompt": "Hello", "suffix": "!"}'
echo
