// Reads a JSON list of objects from standard input, and prints what kstatus, the library of Flux, computes of each.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	var objects []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		log.Fatal(err)
	}
	for _, written := range objects {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(written); err != nil {
			log.Fatal(err)
		}
		result, err := status.Compute(object)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(result.Status)
	}
}
